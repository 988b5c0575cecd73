"""Trains one method on one task.

python experiments/run_tff.py                                    # FedLabel on digits
python experiments/run_tff.py --task fashion_mnist --data_dir ~/tensorflow_datasets
python experiments/run_tff.py --flagfile experiments/flagfiles/cifar10.flags
"""

import sys

from tff_fedlabel import cli

if __name__ == "__main__":
    sys.exit(cli.main(sys.argv))
