"""From a profile to a plan: which unit gets how many GPUs in which shape, and why.

Start with `solve` (what `disttrain plan` calls). `units` groups modules, `options` lists the shapes
of a unit and their times, `partition` splits its layers over stages, `search` finds the best
combination exactly under the formula of `objective` within the bounds of `bounds`, `finalists`
ranks the best by simulation, `climb` goes on to their neighbours, `splitting` says when gradients
of weights are computed, `baselines` are the other strategies, `sharded` is FSDP, `interleaved` are
Megatron's virtual stages, `infeasible` names the limit in the way. `step` makes a layout's step for
the simulator, `predict` runs it, `traffic` counts what crosses links and what CPU nodes must
deliver. `check` guards plans edited by hand and says what training does not run, `explain` says
why, `sensitivity` what would change, `picture` draws the step.
"""
