"""A modality and an encoder in a package of their own: curves, files of one number a line."""
