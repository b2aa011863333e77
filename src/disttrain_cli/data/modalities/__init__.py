"""How the items of each modality get from files to arrays. A modality is a file here, a class of
heads in `spec.heads`, and its layers in `models`."""
