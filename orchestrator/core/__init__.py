"""The mind: values in, values out. No clock, no I/O, no randomness, no logging.

A fact goes through `step`: the table says which phase follows, `absorb` what is learned from it, `enter`
what the new phase decides, and `advance` what the job as a whole can do next. The result is the next
state and the decisions that were taken; the loop commits both or neither.
"""
