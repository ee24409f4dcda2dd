"""Tessera inside other libraries. Each module here imports the library that it is for; nothing imports it."""
