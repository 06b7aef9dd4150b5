# Ten more epochs at the last learning rate, 1e-5, at which the cosine leaves it.
_base_ = './imagenet_300e.py'

train_cfg = dict(max_epochs=310)
