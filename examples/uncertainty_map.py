"""What a model knows of the plane: it has learned two classes, then two more, without the rows of the first two.

Writes uncertainty_map.png: the predicted class, the entropy of the prediction, and how unfamiliar each point is. Needs
matplotlib: pip install 'evcl[report]'.
"""

import matplotlib.pyplot as plt
import numpy as np

import evcl

CENTRES = {"cat": (-2, -1), "dog": (1, -2), "eel": (-1, 2), "owl": (2, 1)}
COLOURS = ("#0068b8", "#c5430a", "#2d8a3e", "#7a4fb3")
draws = np.random.default_rng(0)
rows = {name: draws.normal(centre, 0.6, size=(150, 2)).astype("float32") for name, centre in CENTRES.items()}


def task(*names: str) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([rows[name] for name in names]), np.repeat(names, 150)


learner = evcl.EVCL(evcl.nn.mlp(2, [50, 50]), seed=0)
learner.learn(task("cat", "dog"), task="first")
learner.learn(task("eel", "owl"), task="second", head="first")  # among all four from now on
x, y = task(*CENTRES)
print(f"{100 * np.mean(learner.predict(x) == y):.0f} % right")

side = np.linspace(-6, 6, 160, dtype="float32")
plane = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
found = learner.predictions(plane)
classes = [str(name) for name in learner.classes("second")]
label = np.array([classes.index(name) for name in found.labels])
maps = {
    "predicted class": label,
    "entropy (nats)": np.asarray(found.entropy),
    "unfamiliar (1: typical)": np.minimum(np.asarray(found.unfamiliar), 8),
}
figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
for axis, (title, values) in zip(axes, maps.items(), strict=True):
    grid = values.reshape(160, 160)
    if title == "predicted class":
        axis.contourf(side, side, grid, levels=[-0.5, 0.5, 1.5, 2.5, 3.5], colors=COLOURS, alpha=0.3)
    else:
        shown = axis.contourf(side, side, grid, levels=12, cmap="Blues")
        figure.colorbar(shown, ax=axis, shrink=0.8)
    for name, colour in zip(classes, COLOURS, strict=True):
        axis.scatter(*rows[name].T, s=4, color=colour)
        if title == "predicted class":
            axis.annotate(name, CENTRES[name], ha="center", weight="bold", bbox={"fc": "white", "ec": "none", "pad": 1})
    axis.set(title=title, xticks=[], yticks=[], aspect="equal")
figure.savefig("uncertainty_map.png", dpi=130)
