#!/bin/bash
# A Cloud TPU slice: 16 chips of v6e on 4 hosts. Run it in a checkout, on your machine:
#
#   FILESTORE=10.0.0.2:/share bash examples/cluster/tpu_slice.sh my-tpu us-east5-b
#
# Every host runs the program, which asks the metadata server for the others. If one of them fails, the
# others end, and all start again. FILESTORE is a file share of the same network (Filestore or another
# NFS server) for the checkpoints, which survive the slice there. If the slice was preempted, delete it and
# run the script again. Delete it, too, when you are done: gcloud compute tpus tpu-vm delete my-tpu
set -euo pipefail
tpu=${1:?the name of the TPU} zone=${2:?its zone}
: "${FILESTORE:?ADDRESS:/SHARE of an NFS server}" # before anything is made

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
    && sudo mount -t nfs $FILESTORE /mnt && sudo install -d -m 777 /mnt/train; }"

on_all_hosts 'for attempt in 1 2 3 4; do
    env/bin/python train.py --tpu --checkpoints /mnt/train && exit 0
    sleep 10
done
exit 1'
