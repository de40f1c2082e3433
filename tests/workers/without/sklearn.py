raise ImportError("Keras imports it where it is there, which takes a third of its time; no worker here needs it")
