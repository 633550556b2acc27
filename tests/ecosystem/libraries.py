LIBRARIES = []
def child(k): pass
def run(c): pass
