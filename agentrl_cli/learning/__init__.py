"""The learning mathematics: advantages (numpy), losses and batches (torch). No loop, no store, no model here."""
