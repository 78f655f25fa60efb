"""The model server: one loaded model, its adapters, and every client that speaks a dialect of the gateway."""
