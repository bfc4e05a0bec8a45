#!/bin/bash
# A Cloud TPU slice: 16 chips of v6e on 4 hosts. Run it in a checkout, on your machine:
#
#   FILESTORE=10.0.0.2:/share bash examples/cluster/tpu_slice.sh my-tpu us-east5-b
#
# Every host runs the program, which asks the metadata server for the others. If one of them fails, the
# others end, and all start again. FILESTORE is a file share of the same network (Filestore or another
# NFS server) for the checkpoints, which survive the slice there. Run the script again if the slice was
# preempted.
set -euo pipefail
tpu=$1 zone=$2

on_all_hosts() {
    gcloud compute tpus tpu-vm ssh "$tpu" --zone="$zone" --worker=all --command="$1"
}

gcloud compute tpus tpu-vm describe "$tpu" --zone="$zone" >/dev/null 2>&1 ||
    gcloud compute tpus tpu-vm create "$tpu" --zone="$zone" \
        --accelerator-type=v6e-16 --version=v2-alpha-tpuv6e
gcloud compute tpus tpu-vm scp --zone="$zone" --worker=all --recurse \
    pyproject.toml README.md LICENSE src examples/cluster/train.py "$tpu":

# The Python of the image may be older than 3.11.
on_all_hosts "pip install -q uv && python3 -m uv venv -q --clear --python 3.12 env \
    && python3 -m uv pip install -q --python env/bin/python '.[keras,tpu]' scikit-learn"
on_all_hosts "mountpoint -q /mnt || { sudo apt-get install -y -q nfs-common \
    && sudo mount -t nfs $FILESTORE /mnt && sudo chmod 777 /mnt; }"

on_all_hosts 'for attempt in 1 2 3 4; do
    env/bin/python train.py --tpu --checkpoints /mnt/checkpoints && exit 0
    sleep 10
done
exit 1'
