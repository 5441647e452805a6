"""A pump is watched: each reading is predicted before it is learned. At reading 3,000 a seal breaks, and what used to
foretell a failure no longer does. `evcl.Stream` raises an alarm and learns the new rule; a model that was trained once,
on the first 1,500 readings, goes on as before.

Writes stream_with_alarm.png. Needs matplotlib and scikit-learn: pip install 'evcl[report,data]'.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LogisticRegression

import evcl

NAMES, ROWS, BREAK, WINDOW = ("pressure", "vibration", "heat", "flow"), 6000, 3000, 200
draws = np.random.default_rng(0)
x = draws.normal(size=(ROWS, 4))
score = np.where(np.arange(ROWS) < BREAK, x[:, 0] + x[:, 1], x[:, 1] - 2 * x[:, 2])  # the rule before and after
fails = (score + draws.logistic(0, 0.4, ROWS) > 0).astype(int)

stream = evcl.Stream(false_alarms=1e-5)  # on average one in 100,000 readings, or fewer
found = evcl.streams.evaluate(stream, (x, fails), window=WINDOW)
once = LogisticRegression().fit(x[:1500], fails[:1500]).predict(x) == fails
ends = np.arange(WINDOW, ROWS + 1, WINDOW)
print(found)

figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
axes.plot(ends[8:], 100 * once.reshape(-1, WINDOW).mean(1)[8:], color="#8a8f98", linewidth=2.5)
axes.plot(ends, 100 * np.array(found.curves["accuracy"]), color="#0068b8", linewidth=3)
axes.text(ROWS, 66, "trained once", color="#6b7078", ha="right", fontsize=13)
axes.text(ROWS, 96, "evcl.Stream", color="#0068b8", ha="right", fontsize=13, fontweight="bold")
for alarm in stream.alarms:
    moved = ", ".join(NAMES[place] for place in alarm.columns)
    print(f"alarm at reading {alarm.row + 1:,} ({moved}): {alarm.action}")
    axes.axvline(alarm.row, color="#c5430a", linewidth=1.5, linestyle="--")
    axes.text(alarm.row, 47, f" alarm after {alarm.row - BREAK} readings:\n {moved}", color="#c5430a", fontsize=12)
axes.set(xlabel="readings", ylabel="accuracy (%)", ylim=(45, 100), xlim=(0, ROWS))
axes.set_title("Each reading is predicted, then learned", loc="left", fontsize=14)
axes.spines[["top", "right"]].set_visible(False)
figure.savefig("stream_with_alarm.png", dpi=150)
