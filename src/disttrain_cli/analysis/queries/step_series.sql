-- Losses, learning rate, MFU and time of every recorded step.
SELECT step, loss, loss_text, loss_image, evaluation_loss_text, evaluation_loss_image, grad_norm, learning_rate,
       tokens / s.iteration_s AS tokens_per_s, coalesce(w.window_s, s.iteration_s) AS iteration_s, mfu,
       sequences_per_s, data_wait_s, coalesce(w.measured, false) AS measured
FROM steps s FULL JOIN windows w USING (step) ORDER BY step;
