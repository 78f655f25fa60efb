"""The work folder of a box: files in and out, snapshots, deletion."""
