"""A one-line summary of each method and benchmark. `evcl list` prints them in this order, without importing torch."""

METHOD_SUMMARIES = {
    "evcl": "VCL plus an elastic, Fisher-weighted penalty on means and variances",
    "vcl": "a Gaussian over each weight, which becomes the prior of the next task",
    "vcl-random-coreset": "VCL, fine-tuned for prediction on random examples of every task",
    "vcl-kcenter-coreset": "VCL, fine-tuned for prediction on k-center examples of every task",
    "gvcl": "VCL with a strength of its own for what earlier tasks added to the prior",
    "improved-vcl": "VCL that draws the means anew before every task",
    "td-vcl": "VCL with the KL to the last few posteriors, and examples of their tasks",
    "ewc": "plain weights plus a Fisher-weighted penalty on changing them",
    "ewc-offline": "EWC with one anchor and one Fisher per task",
    "si": "plain weights; penalty weighted by what each weight's path did for the loss",
    "mas": "plain weights; penalty weighted by how much each weight moves the outputs",
    "imm-mean": "plain weights; predicts with the mean of the tasks' solutions",
    "imm-mode": "plain weights; predicts with the tasks' solutions, averaged by their Fisher",
    "xdg": "EWC on a random part of the hidden units for each task",
    "lwf": "plain weights; distils the old heads on the new task's inputs",
    "random-coreset": "plain training from scratch on random examples of every task so far",
    "kcenter-coreset": "plain training from scratch on k-center examples of every task so far",
    "naive": "plain training on one task after another",
    "joint": "plain training on all tasks at once",
}
BENCHMARK_SUMMARIES = {
    "permuted-mnist": "MNIST, one random pixel order per task, one head",
    "split-mnist": "MNIST, 0/1 2/3 4/5 6/7 8/9, one head per task",
    "split-notmnist": "notMNIST, A/F B/G C/H D/I E/J, one head per task",
    "split-fashion-mnist": "Fashion-MNIST, top/trouser to bag/boot",
    "split-cifar10": "CIFAR-10 as 28x28 grey, plane/car to ship/truck",
    "split-cifar10-rgb": "CIFAR-10 in colour, the same pairs",
    "permuted-digits": "8x8 digits, one random pixel order per task, one head",
    "split-digits": "8x8 digits, 0/1 2/3 4/5 6/7 8/9, one head per task",
}
