-- Work of every replica in every slot of the chosen steps, by module: the columns of `Work`.
SELECT step, slot, module, replica, max(items) AS items, max(tokens) AS tokens, max(sum_length_sq) AS sum_length_sq
FROM operations WHERE list_contains($steps, step) AND operation = 'forward' GROUP BY step, slot, module, replica;
