"""The algorithms of hvd_hetero, free of any framework: shares, weighted gradients, codecs, local SGD, rates."""

if __name__ == "optimizers":
    # In a checkout, `import optimizers` would make a second copy of every class beside hvd_hetero.optimizers.
    raise ImportError(
        "This folder is the package hvd_hetero.optimizers. Expected: import hvd_hetero.optimizers. "
        "Received: import optimizers."
    )
