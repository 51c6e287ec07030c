#!/bin/sh
# Downloads what routers need to render and tokenize prompts of a model, some megabytes, not its weights.
#
#   tokenizer.sh MODEL FOLDER
#
# MODEL is a Hugging Face name. HF_TOKEN is sent if it is set, and HF_ENDPOINT may name a mirror. Only
# tokenizer.json must exist. Wants curl.
set -eu
model=$1 folder=$2
from=${HF_ENDPOINT:-https://huggingface.co}/$model/resolve/main
for file in tokenizer_config.json special_tokens_map.json config.json preprocessor_config.json \
    chat_template.jinja chat_template.json tokenizer.json; do
    # The token as a header from standard input, so that it is in no list of processes.
    status=$(printf '%s' "${HF_TOKEN:+Authorization: Bearer $HF_TOKEN}" |
        curl --silent --show-error --location --retry 5 --max-time 300 --header @- \
            --output "$folder/$file.new" --write-out '%{http_code}' "$from/$file")
    case $status:$file in
        200:*) mv "$folder/$file.new" "$folder/$file" ;;
        404:tokenizer.json) echo "tokenizer.sh: $model has no tokenizer.json" >&2; exit 1 ;;
        404:*) rm -f "$folder/$file.new" "$folder/$file" ;;
        *) echo "tokenizer.sh: $from/$file: status $status" >&2; exit 1 ;;
    esac
done
