"""The demo: a byte-level language model trained on real text by several local ranks.

module      what it decides
options     what a user may ask for
text        which files are trained on, and in which order their windows come
schedule    the learning rate of a step, and how many collectives a run needs
job         what one phase hands its ranks, and what they hand back
ports       what is asked of a framework
events      how rank 0 tells the command what it has done
progress    what the terminal shows
report      what report.json holds
picture     what loss.png shows
run         the order of it all

Everything here is free of any framework; `hyper_parallel._torch` trains.
"""
