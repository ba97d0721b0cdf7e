"""Draft with a trained head that reads the last hidden state and the next token."""
