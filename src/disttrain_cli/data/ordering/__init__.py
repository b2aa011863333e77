"""Orderings: the sequences and items of every replica in every slot of a step.

They are pure functions of sizes, layout and profile. Start at `orders` (a run's steps under its
policy, `shared_orders` for many threads). `assigning` has the policies `none` and `paper`
(`levelling` balances replicas, `intervals` orders slots), `best` the search: `fitting` balances
several loads of sequences at once, `shaping` sets the work of slots, `sequencing` their order, or
`apart` orders replicas separately in a layout of one unit. `loads` computes every replica's work
under an assignment.
"""
