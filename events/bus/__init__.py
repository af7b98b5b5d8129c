"""The wire: the only room that imports redis. Every script, key and reply shape of the server stands here."""
