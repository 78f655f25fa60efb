"""What all screens share: the reader, dialogs, the episode table, token layers, charts."""
