"""What a checkpoint is turned into: Hugging Face folders (`export`) and generated images (`sampling`)."""
