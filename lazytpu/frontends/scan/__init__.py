"""`lazytpu.scan_layers`: equal layers as one loop."""
