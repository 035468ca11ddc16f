"""A gcloud that keeps what it was asked and plays the cloud, in folders of this machine.

The remote commands are really executed, by a bash whose home is the worker's folder.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path


def main() -> int:
    folder = Path(os.environ["GCLOUD_STANDIN"])
    plan = json.loads((folder / "plan.json").read_text())
    arguments = sys.argv[1:]
    assert arguments[:3] == ["compute", "tpus", "tpu-vm"]
    call = {
        "arguments": arguments,
        "stdin": sys.stdin.read(),
        "environment": sorted(os.environ),
    }
    with (folder / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(call) + "\n")
    for answer in plan["answers"]:
        if set(answer["to"]) <= set(arguments):
            print(answer["errors"], file=sys.stderr)
            return int(answer["code"])
    flags = dict(flag.split("=", 1) for flag in arguments if flag.startswith("--") and "=" in flag)
    if arguments[3] == "describe":
        print(json.dumps(plan["node"]))
    elif arguments[3] == "ssh":
        print(f"SSH: Attempting to connect to worker {flags['--worker']}...", file=sys.stderr)
        code = 0
        for _ in range(plan["tries"]):
            code = remote(folder, flags["--worker"], flags["--command"])
        return code
    elif arguments[3] == "scp":
        # As gcloud's own, which has no name of a VM but those in the paths.
        paths = [argument for argument in arguments[4:] if not argument.startswith("--")]
        if plan["tries"]:
            copy(folder / f"worker{flags['--worker']}", *paths)
    return 0


def remote(folder: Path, worker: str, command: str) -> int:
    # As gcloud and ssh do it: split at spaces, joined with spaces, then the remote's shell.
    line = " ".join(command.split(" "))
    home = folder / f"worker{worker}"
    environment = {"HOME": str(home), "PATH": f"{folder}/remote-bin:/usr/bin:/bin", "LANG": "C"}
    return subprocess.run(["bash", "-c", line], cwd=home, env=environment, check=False).returncode


def copy(home: Path, source: str, destination: str) -> None:
    if ":" in source:
        path = home / source.partition(":")[2]
        copied = shutil.copytree if path.is_dir() else shutil.copyfile
        copied(path, Path(destination) / path.name)
        return
    target = home / destination.partition(":")[2]
    (home / "mode_before_copy").write_text(f"{target.parent.stat().st_mode & 0o777:o}")
    shutil.copyfile(source, target)
    target.chmod(Path(source).stat().st_mode & 0o755)  # less the umask of most


sys.exit(main())
