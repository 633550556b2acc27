"""`lazytpu.compile`: a recorded step that runs again without its Python."""
