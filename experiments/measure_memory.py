"""Memory of the driver and of TFF's worker over the rounds of a small run.

python experiments/measure_memory.py --rounds 300 --output experiments/results/memory.csv
"""

import sys

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_integer("rounds", 300, "rounds of FedLabel on digits")
    flags.DEFINE_string("output", None, "CSV file; default: the screen only")


def measure() -> int:
    if FLAGS.output:
        command_line.check_output("output", FLAGS.output, folder=False)
    import os
    import pathlib
    import tempfile

    import pandas as pd

    from tff_fedlabel import training

    def resident_mb(pid: str) -> float:
        fields = pathlib.Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()
        return int(fields[0]) / 1024

    def is_worker(pid: str) -> bool:
        try:
            command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return command[0].endswith(b"worker_binary") and _descends(pid, os.getpid())

    def _descends(pid: str, ancestor: int) -> bool:
        while pid not in ("0", "1"):
            if int(pid) == ancestor:
                return True
            status = pathlib.Path(f"/proc/{pid}/status").read_text()
            pid = status.split("PPid:")[1].split()[0]
        return False

    rows = []

    def on_round(done, metrics):
        del metrics
        if done == 1 or done % 20 == 0:
            workers = [p.name for p in pathlib.Path("/proc").iterdir() if is_worker(p.name)]
            rows.append(
                {
                    "round": done,
                    "driver_mb": resident_mb("self"),
                    "worker_mb": sum(resident_mb(pid) for pid in workers),
                }
            )

    with tempfile.TemporaryDirectory() as directory:
        config = training.make_config("digits", rounds=FLAGS.rounds)
        training.run(config, directory, resume=True, runtime="local", on_round=on_round)
    table = pd.DataFrame(rows)
    print(table.to_string(index=False, float_format="%.1f"))
    if FLAGS.output:
        table.to_csv(FLAGS.output, index=False, float_format="%.1f")
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, measure))
