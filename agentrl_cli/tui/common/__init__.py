"""Parts of all screens: the reader, dialogs, the episode table, token layers, charts."""
