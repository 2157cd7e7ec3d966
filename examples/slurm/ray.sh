#!/bin/bash
# A run of fedbayes over the nodes of a Slurm job, by Ray:
#
#     sbatch --nodes 4 ray.sh config.toml runs/big
#
# The same command again goes on with a run that the time limit, or a lost node, cut short.
#SBATCH --job-name=fedbayes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
set -euo pipefail

config=${1:?usage: sbatch [options] ray.sh CONFIG RUN [options of fedbayes run]}
folder=${2:?usage: sbatch [options] ray.sh CONFIG RUN [options of fedbayes run]}
shift 2

# What makes fedbayes available on a node, such as `module load python` or the activation of a
# virtual environment, belongs here: the nodes get the environment of this script.

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
cpus=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}
gpus=${SLURM_GPUS_ON_NODE:-0}

# Jobs of several users may share a node: a port that goes by the job, and a token that only this
# job's processes know. Without one, whoever reaches the port could run code.
port=${RAY_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
# Sockets of Ray are in there, and their names are short; it goes with the job.
place=/tmp/ray-$SLURM_JOB_ID

started=()
run=
end() {
    for process in "${started[@]}"; do kill "$process" 2>/dev/null || true; done
    wait || true
    srun --nodes="${#nodes[@]}" --ntasks-per-node=1 --overlap rm -rf "$place" || true
}
trap end EXIT
# Before the time is up, fedbayes ends the round under way, and the run can be resumed.
trap '[[ -n $run ]] && kill -TERM "$run" 2>/dev/null || true' TERM

start() { # NODE, and what `ray start` is told
    local node=$1
    shift
    srun --nodes=1 --ntasks=1 --overlap --nodelist="$node" \
        ray start "$@" --num-cpus="$cpus" --num-gpus="$gpus" --disable-usage-stats --block &
    started+=($!)
}

start "$head" --head --port="$port" --include-dashboard=false --temp-dir="$place"
for _ in {1..120}; do
    (exec 3<>"/dev/tcp/$head/$port") 2>/dev/null && break
    sleep 1
done
for node in "${nodes[@]:1}"; do
    start "$node" --address="$head:$port"
done

# This script runs on the first node, beside the head. There are as many actors as the nodes have
# room for; nodes that join late are made use of from the next round on.
export RAY_ADDRESS=$head:$port
if [[ -e $folder/config.toml ]]; then
    fedbayes resume "$folder" &
else
    fedbayes run "$config" --engine ray --out "$folder" "$@" &
fi
run=$!
status=0
wait "$run" || status=$?
while kill -0 "$run" 2>/dev/null; do # a signal woke this script, and the run ends its round
    status=0
    wait "$run" || status=$?
done
exit "$status"
