#!/usr/bin/env bash
# What `make run` does before it starts the daemon: sets up, converts the model, writes the example configuration, and
# as root builds the BPF programs.
# From the environment:
#
#   ENGINE   vllm or synthetic
#   MODEL    hub name, path of a model directory or of a .gguf file; Gemma 3 270M without it
#   PORT     TCP port on 127.0.0.1
#   STATE    directory for configuration, keys and converted models
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${ENGINE:?}" "${PORT:?}" "${STATE:?}" "${MODEL:=}"

refuse() { echo "cannot run $*" >&2; exit 2; }

# A word that is wrong is told now and not after minutes of installing.
case $ENGINE in
    vllm | synthetic) ;;
    *) refuse "ENGINE=$ENGINE: it is vllm or synthetic" ;;
esac
case $MODEL in
    '') ;;
    *.gguf) [ -f "$MODEL" ] || refuse "MODEL=$MODEL: there is no such file" ;;
    /* | ./* | ../*) [ -d "$MODEL" ] || refuse "MODEL=$MODEL: there is no such directory" ;;
    */*) ;;
    *) refuse "MODEL=$MODEL: give a hub name (owner/name), a directory (./name) or a .gguf file" ;;
esac

# gguf ARGUMENT...: prints the directory of the converted model.
gguf() {
    packaging/setup.sh model
    .venv/bin/python -m seedance.engine.gguf --into "$STATE/models" "$@"
}

init=(.venv/bin/python -m seedance.daemon.commands.init "$STATE" --engine "$ENGINE" --port "$PORT")
# Only root can load BPF programs.
parts=(base)
[ "$(id -u)" != 0 ] || parts+=(bpf)
if [ "$ENGINE" = synthetic ]; then
    packaging/setup.sh "${parts[@]}"
else
    packaging/setup.sh "${parts[@]}" engine
    case $MODEL in
        '')
            model=$(gguf)
            init+=(--model "$model" --name gemma-3-270m)
            ;;
        *.gguf)
            model=$(gguf --file "$MODEL")
            init+=(--model "$model" --name "$(basename "$MODEL" .gguf)")
            ;;
        *)
            [ ! -d "$MODEL" ] || MODEL=$(realpath "$MODEL")
            init+=(--model "$MODEL")
            ;;
    esac
fi
"${init[@]}" >/dev/null
[ "$(id -u)" != 0 ] || .venv/bin/python packaging/build_bpf.py
