"""From a profile to a plan: GPUs and shape of every unit, with explanation.

Start with `solve` (called by `disttrain plan`). `units` groups modules, `options` lists the shapes
of a unit and their times, `partition` partitions its layers into stages, `search` finds the best
combination exactly under the formula of `objective` within the bounds of `bounds`, `finalists`
ranks the best by simulation, `climb` continues to their neighbours, `split_backward` schedules
deferred weight gradients, `sharded` is FSDP, `interleaved` are Megatron's virtual stages,
`infeasible` names the binding limit. `predict` simulates a layout's steps (built by
`simulation.step`), `traffic` counts bytes over links and the throughput required of CPU nodes.
`check` validates plans edited by hand and lists what training does not run, `explain` explains a
plan, `sensitivity` answers what-if questions, `picture` draws the step.
"""
