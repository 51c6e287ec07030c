"""The engine that computes a Llama model with torch."""
