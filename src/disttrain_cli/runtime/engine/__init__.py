"""One rank's computation: its stage's layers under DeepSpeed's pipeline engine.

`assemble` builds it from a plan and a place; `engine` drives the schedule, `stage` computes one
slot, `gradients` says where gradients flow, `optimizer` turns them into updates, `faults` names
what goes wrong in a step.
"""
