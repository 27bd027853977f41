/* A port in C, which reads a trace (docs/traces.md) and writes its rows; for little-endian machines.
 *
 *     cc -O2 -o port examples/port.c
 *     python -m parity record lagging.trace
 *     python -m parity replay lagging.trace --command "./port {inputs} {outputs}"
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t shape[3]; /* 0 past the last axis */
    int item;         /* bytes; 0: there is no such array */
    const char *data;
} Array;

static char *header;
static const char *body;

static void fail(const char *what) {
    fprintf(stderr, "port: %s\n", what);
    exit(1);
}

static char *grow(char *old, size_t bytes) {
    char *memory = realloc(old, bytes ? bytes : 1);
    if (!memory) fail("out of memory");
    return memory;
}

/* What stands behind a key and its colon. */
static char *behind(char *text, const char *key) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    char *found = strstr(text, quoted);
    return found ? found + strlen(quoted) : NULL;
}

static Array find(const char *name) {
    Array array = {{0, 0, 0}, 0, NULL};
    char *entry = behind(header, name);
    if (!entry) return array;
    char kind = strchr(behind(entry, "dtype"), '"')[2]; /* of I64, I32, U8 or BOOL the second letter or digit */
    array.item = kind == '6' ? 8 : kind == '3' ? 4 : 1;
    char *next = strchr(behind(entry, "shape"), '[');
    for (int axis = 0; axis < 3 && *next != ']'; axis++) array.shape[axis] = strtoll(next + 1, &next, 10);
    array.data = body + strtoll(strchr(behind(entry, "data_offsets"), '[') + 1, NULL, 10);
    return array;
}

/* An array of a step, or of the whole trace where step is -1. */
static Array need(int64_t step, const char *name) {
    char full[64];
    if (step < 0) snprintf(full, sizeof full, "%s", name);
    else snprintf(full, sizeof full, "%lld/%s", (long long)step, name);
    Array array = find(full);
    if (!array.item) fail(full);
    return array;
}

static int64_t at(Array array, int64_t index) {
    int64_t wide;
    int32_t narrow;
    if (array.item == 1) return (unsigned char)array.data[index];
    if (array.item == 4) return memcpy(&narrow, array.data + 4 * index, 4), narrow;
    return memcpy(&wide, array.data + 8 * index, 8), wide;
}

int main(int count, char **words) {
    if (count != 3) fail("expected two paths, inputs and outputs");
    FILE *file = fopen(words[1], "rb");
    if (!file || fseek(file, 0, SEEK_END)) fail("cannot open the inputs");
    size_t size = (size_t)ftell(file);
    char *bytes = grow(NULL, size + 1);
    rewind(file);
    if (fread(bytes, 1, size, file) != size || size < 8) fail("cannot read the inputs");
    uint64_t length;
    memcpy(&length, bytes, 8);
    header = grow(NULL, length + 1);
    memcpy(header, bytes + 8, length);
    header[length] = 0;
    body = bytes + 8 + length;

    Array map = need(-1, "token_map"), multipliers = need(-1, "multipliers"), primes = need(-1, "primes");
    Array offsets = need(-1, "offsets"), steps = need(-1, "steps"), told = need(-1, "story");
    char *story = grow(NULL, (size_t)told.shape[0] + 1);
    memcpy(story, told.data, (size_t)told.shape[0]);
    story[told.shape[0]] = 0;
    int64_t pad = at(map, strtoll(behind(story, "engram_pad_token_id"), NULL, 10));
    int64_t layers = multipliers.shape[0], n = multipliers.shape[1], columns = primes.shape[1], heads = columns / (n - 1);

    int64_t engines = 0;
    for (int64_t s = 0; s < steps.shape[0]; s++) engines = at(steps, 4 * s) >= engines ? at(steps, 4 * s) + 1 : engines;
    int32_t **slots = (int32_t **)grow(NULL, (size_t)engines * sizeof *slots);
    int64_t *bound = (int64_t *)grow(NULL, (size_t)engines * sizeof *bound);
    for (int64_t e = 0; e < engines; e++) slots[e] = NULL, bound[e] = -1;

    char *text = grow(NULL, 192 * (size_t)(steps.shape[0] + 1)), *end = text, *out = NULL;
    size_t written = 0;
    for (int64_t s = 0; s < steps.shape[0]; s++) {
        int64_t engine = at(steps, 4 * s), block_size = at(steps, 4 * s + 1), room = at(steps, 4 * s + 2) * block_size;
        Array ids = need(s, "input_ids"), positions = need(s, "positions"), starts = need(s, "query_start_loc");
        Array dead = need(s, "dead_mask"), window = need(s, "lookback_token_ids"), hidden = need(s, "lookback_dead_mask");
        Array mapping = {{0}, 0, NULL}, table = mapping, copies;
        int64_t live = at(starts, starts.shape[0] - 1), depth = n - 1;
        if (block_size) mapping = need(s, "slot_mapping"), table = need(s, "block_table");
        if (bound[engine] != at(steps, 4 * s + 3)) {
            bound[engine] = at(steps, 4 * s + 3);
            slots[engine] = (int32_t *)memset(grow((char *)slots[engine], 4 * (size_t)room), 0, 4 * (size_t)room);
        }
        int32_t *slot = slots[engine];
        char name[64];
        snprintf(name, sizeof name, "%lld/slot_copies", (long long)s);
        if ((copies = find(name)).item && block_size) {
            int32_t *read = (int32_t *)grow(NULL, 4 * (size_t)copies.shape[0]);
            for (int64_t i = 0; i < copies.shape[0]; i++) read[i] = slot[at(copies, 2 * i)];
            for (int64_t i = 0; i < copies.shape[0]; i++) slot[at(copies, 2 * i + 1)] = read[i];
            free(read);
        }
        for (int64_t t = 0; block_size && t < live; t++)
            if (at(mapping, t) >= 0) slot[at(mapping, t)] = at(dead, t) ? -1 : (int32_t)at(map, at(ids, t));

        size_t bytes_here = 4 * (size_t)(live * layers * columns);
        out = grow(out, written + bytes_here);
        int32_t *rows = (int32_t *)(out + written);
        for (int64_t r = 0; r + 1 < starts.shape[0]; r++) {
            int64_t begin = at(starts, r), first = begin < live ? at(positions, begin) : 0;
            for (int64_t t = begin; t < at(starts, r + 1); t++)
                for (int64_t layer = 0; layer < layers; layer++) {
                    int64_t mix = 0;
                    int blocked = 0;
                    for (int64_t k = 0; k < n; k++) {
                        int64_t q = at(positions, t) - k, source = pad, cell = r * depth + first - 1 - q;
                        if (q >= first)
                            source = at(dead, t - k) ? -1 : at(map, at(ids, t - k));
                        else if (q >= 0 && at(window, cell) >= 0)
                            source = at(hidden, cell) ? -1 : at(map, at(window, cell));
                        else if (q >= 0 && block_size)
                            source = slot[at(table, r * table.shape[1] + q / block_size) * block_size + q % block_size];
                        blocked |= q < 0 || source < 0;
                        mix ^= (blocked ? pad : source) * at(multipliers, layer * n + k);
                        for (int64_t c = (k - 1) * heads; k > 0 && c < k * heads; c++) {
                            int64_t i = layer * columns + c;
                            rows[t * layers * columns + i] = (int32_t)(mix % at(primes, i) + at(offsets, i));
                        }
                    }
                }
        }
        end += sprintf(end, "%c\"%lld/rows\":{\"dtype\":\"I32\",\"shape\":[%lld,%lld,%lld],\"data_offsets\":[%zu,%zu]}",
                       s ? ',' : '{', (long long)s, (long long)live, (long long)layers, (long long)columns, written,
                       written + bytes_here);
        written += bytes_here;
    }
    end += sprintf(end, "%s", steps.shape[0] ? "}" : "{}");
    length = (uint64_t)(end - text);
    FILE *target = fopen(words[2], "wb");
    if (!target || fwrite(&length, 8, 1, target) != 1 || fwrite(text, 1, length, target) != length) fail("cannot write");
    if (fwrite(out, 1, written, target) != written || fclose(target)) fail("cannot write");
    return 0;
}
