"""Order of a training step: the one place that states it, as data. No torch.

`one_f_one_b` has the passes of a stage; `program` adds messages, loading and the step's end to
them: the instructions that engine, rehearsal and dry ranks execute. `interleaved` has both for
virtual stages. Simulators and cost models read the passes and their ticks.
"""
