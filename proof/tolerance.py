"""How far a run may be from one process: the differences that count as rounding."""

# The largest relative differences from one process that count as rounding. float32's are 11 to 179
# times what benchmarks.rounding measured after 10 steps (docs/fix/receipts.md)
TOLERANCE = {
    "float64": {"loss": 1e-10, "grad_norm": 1e-10, "grad": 1e-10, "param": 1e-10},
    "float32": {"loss": 1e-5, "grad_norm": 1e-4, "grad": 3e-4, "param": 1e-3},
    "bfloat16": {"loss": 2e-2, "grad_norm": 0.2, "grad": 0.1, "param": 0.1},
    # Islands whose messages have few bits (diloco.py): rounding may push a number to the next step
    # of its grid. 17 to 244 times what islands with `--outer-bits 4` had after 10 steps
    "float32, few bits": {"loss": 1e-4, "grad_norm": 1e-3, "grad": 1e-2, "param": 0.1},
}
# A difference is relative to the largest element of its tensor, or to FLOOR x the largest element
# of all tensors if that is more. Some gradients are zero except for rounding: that of a key's bias,
# and in bfloat16 many small ones.
FLOOR = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 1.0}
FLOOR["float32, few bits"] = FLOOR["float32"]
