"""EWC on three tasks, with evcl."""

from digits import tasks

import evcl

stream = evcl.benchmarks.from_arrays(tasks(), heads="shared")
learner = evcl.EWC(evcl.nn.mlp(64, [100]), seed=0, epochs=20)
for task in stream:
    learner.learn(task)
print([round(100 * accuracy) for accuracy in learner.evaluate(stream).values()])
