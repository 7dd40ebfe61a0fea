#!/usr/bin/env bash
# What `make run` does before it starts the daemon: sets up, converts the model, writes the example configuration.
# From the environment:
#
#   ENGINE   vllm or synthetic
#   MODEL    hub name, path of a model directory or of a .gguf file; Gemma 3 270M without it
#   PORT     TCP port on 127.0.0.1
#   STATE    directory for configuration, keys and converted models
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${ENGINE:?}" "${PORT:?}" "${STATE:?}" "${MODEL:=}"

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
            case $MODEL in
                /* | ./* | ../*) [ -d "$MODEL" ] || { echo "cannot run MODEL=$MODEL: there is no such directory" >&2; exit 2; } ;;
            esac
            [ ! -d "$MODEL" ] || MODEL=$(realpath "$MODEL")
            init+=(--model "$MODEL")
            ;;
        *)
            echo "cannot run MODEL=$MODEL: give a hub name (owner/name), a directory (./name) or a .gguf file" >&2
            exit 2
            ;;
    esac
fi
"${init[@]}" >/dev/null
