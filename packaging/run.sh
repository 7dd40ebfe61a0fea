#!/usr/bin/env bash
# What `make run` does: sets up, makes the example configuration, and runs the daemon in the foreground.
#
#   ENGINE=vllm|synthetic   vllm without it
#   MODEL=...               hub name, path of a model directory or of a .gguf file; Gemma 3 270M without it
#   PORT=8000               TCP port on 127.0.0.1
#   STATE=DIR               configuration, keys, converted models; ~/.local/state/seedance without it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ENGINE=${ENGINE:-vllm}
MODEL=${MODEL:-}
PORT=${PORT:-8000}
STATE=${STATE:-${XDG_STATE_HOME:-$HOME/.local/state}/seedance}

case $ENGINE in
    vllm) packaging/setup.sh base engine ;;
    synthetic) packaging/setup.sh base ;;
    *) echo "cannot run ENGINE=$ENGINE: it is vllm or synthetic" >&2; exit 2 ;;
esac

init=(.venv/bin/seedancectl init "$STATE" --engine "$ENGINE" --port "$PORT")
if [ "$ENGINE" = vllm ]; then
    convert=(.venv/bin/python -m seedance.engine.gguf --into "$STATE/models")
    case $MODEL in
        '')
            packaging/setup.sh model
            model=$("${convert[@]}")
            init+=(--model "$model" --name gemma-3-270m)
            ;;
        *.gguf)
            packaging/setup.sh model
            model=$("${convert[@]}" --file "$MODEL")
            init+=(--model "$model" --name "$(basename "$MODEL" .gguf)")
            ;;
        */*)
            if [ -d "$MODEL" ]; then MODEL=$(realpath "$MODEL"); fi
            init+=(--model "$MODEL")
            ;;
        *)
            echo "cannot run MODEL=$MODEL: give a hub name (owner/name), a directory (./name) or a .gguf file" >&2
            exit 2
            ;;
    esac
fi
"${init[@]}" >/dev/null
exec .venv/bin/seedanced --config "$STATE/seedanced.toml" --hints
