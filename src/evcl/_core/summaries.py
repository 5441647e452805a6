"""One line about each method and benchmark, in the order of `evcl list`, which prints them without importing torch."""

METHOD_SUMMARIES = {
    "evcl": "VCL plus an elastic, Fisher-weighted penalty on means and variances",
    "vcl": "a Gaussian over each weight, which becomes the prior of the next task",
    "vcl-random-coreset": "VCL, tuned for prediction on random examples of every task",
    "vcl-kcenter-coreset": "VCL, tuned for prediction on the k-center examples of every task",
    "gvcl": "VCL, whose hold on the means has a strength of its own",
    "improved-vcl": "VCL, with the means drawn again before every task",
    "td-vcl": "VCL, held by the last few posteriors and examples of their tasks",
    "ewc": "plain weights, held where the Fisher says that earlier tasks need them",
    "lwf": "plain weights; the last network teaches its heads on the new task's inputs",
    "random-coreset": "plain training on random examples of every task, afresh after each",
    "kcenter-coreset": "plain training on the k-center examples of every task, afresh after each",
    "naive": "plain training, task after task",
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
