"""The judge: runs one workload on two implementations, compares bits and explains."""
