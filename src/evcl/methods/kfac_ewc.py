"""EWC with a Kronecker-factored Fisher (Ritter, Botev and Barber, 2018): Laplace's approximation, task after task.

L_t = mean NLL + lambda/2 sum_l tr(D_l^T G_l D_l A_l),   D_l = [W_l, b_l] - [W*_l, b*_l]

The factors and their merging are in kronecker.py. It is EWC with `importance` kfac and Laplace's strength, 1.
"""

from evcl.methods.ewc import EWC
from evcl.methods.kfac_evcl import with_factors

KFAC_EWC = with_factors(EWC)
