"""What a checkpoint is turned into: Hugging Face folders (`export`), and what it draws and writes
(`sampling`)."""
