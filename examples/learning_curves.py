"""Draws the learning curves of the digits examples."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter


def draw(history, required_accuracy, path, losses=None):
    """Draws loss and accuracy per epoch, by the names Keras gives them in a `History`.

    `losses` has the train loss of every number of devices, if there are several.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    epochs = np.arange(1, len(history["loss"]) + 1)
    for axes, name in ((loss, "loss"), (accuracy, "accuracy")):
        label = "train (augmented)"
        if name == "loss" and losses and len(losses) > 1:
            # From the thickest line to the thinnest, so that equal ones show.
            for i, (number, values) in enumerate(losses.items()):
                style = {"color": f"C{2 * i}", "linewidth": 3 * (len(losses) - i)}
                devices = f"{number} device{'s' * (number > 1)}"
                axes.plot(epochs, values, label=f"{label}, {devices}", **style)
        else:
            axes.plot(epochs, history[name], label=label)
        axes.plot(epochs, history[f"val_{name}"], color="C1", label="test")
        axes.set(xlabel="epoch", xlim=(0, len(epochs) + 1))
        axes.grid(alpha=0.3)
    final = history["val_accuracy"][-1]
    loss.set(title="Loss", yscale="log")
    accuracy.set(title=f"Accuracy: {final:.2%} on the test images", ylim=(0.8, 1.005))
    accuracy.set_yticks(np.linspace(0.8, 1, 11))
    accuracy.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    accuracy.axhline(required_accuracy, color="gray", linestyle="--", label="required")
    accuracy.legend(loc="lower right")
    loss.legend()
    figure.savefig(path, dpi=150)
