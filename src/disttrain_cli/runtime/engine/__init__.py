"""Computation of one rank: its stage's layers under DeepSpeed's engine.

`assemble` builds it from a plan and rank coordinates; `engine` executes the program, `stage`
computes one slot, `gradients` determines where gradients flow, `optimizer` turns them into updates,
`faults` diagnoses non-finite numbers and out-of-memory errors in a step.
"""
