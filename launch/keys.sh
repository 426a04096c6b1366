# shellcheck shell=bash
# To be sourced: what the launchers know of the programs' secrets.

# Prints the names of the endpoints' keys that are set, MEMCALIB_JUDGE_API_KEY among them, and of
# the model hub's.
key_names() {
    local name
    for name in "${!MEMCALIB_@}" HF_TOKEN; do
        if [[ "$name" = *_API_KEY || "$name" = HF_TOKEN ]] && [ -n "${!name:-}" ]; then
            echo "$name"
        fi
    done
}
