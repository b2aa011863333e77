"""Which sequences and items every replica gets in every slot of a step: pure functions of sizes,
layout and profile.

Start at `orders` (a run's steps under its policy, `shared_orders` for many threads). `assigning`
has the policies `none` and `paper` (`levelling` over replicas, `intervals` over slots), `best` the
search: sequences `fitting` several loads at once, the work of slots by `shaping`, their order by
`sequencing`, or replicas `apart` in a layout of one unit. `loads` says what an assignment brings to
every replica.
"""
