"""What others published, by name: the part of the golden fixtures that nobody computes."""

import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "fixtures" / "v1" / "published" / "vectors.json"
# name -> inputs and expected values; the sources stand in the file
PUBLISHED: dict[str, Any] = {
    vector["id"].partition("/")[2].replace("-", "_"): vector["inputs"] | vector["expected"]
    for vector in json.loads(_FILE.read_text(encoding="utf-8"))["vectors"]
}
