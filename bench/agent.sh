# An agent of three model calls for bench.load, sourced by the shell harness: bash alone, one connection, a few
# milliseconds of CPU, so that what is measured is Polar and not its agents.
LC_ALL=C
place=${OPENAI_BASE_URL#http://}
address=${place%%/*}
messages="{\"role\":\"user\",\"content\":\"$INSTRUCTION\"}"
exec 3<>"/dev/tcp/${address%:*}/${address##*:}" || exit 4
for turn in 1 2 3; do
  body="{\"model\":\"m\",\"messages\":[$messages],\"max_tokens\":32}"
  printf 'POST /%s/chat/completions HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s' \
    "${place#*/}" "$address" "$OPENAI_API_KEY" "${#body}" "$body" >&3
  read -r -t 120 _ code _ <&3 || exit 5
  length=0
  while IFS= read -r line <&3 && line=${line%$'\r'} && [[ $line ]]; do
    [[ ${line,,} == content-length:* ]] && length=${line#*: }
  done
  IFS= read -r -N "$length" reply <&3
  if [[ $code != 200 || ! $reply =~ \"content\":\"([^\"]*)\" ]]; then
    echo "the proxy answered $code: $reply" >&2
    exit 6
  fi
  messages+=",{\"role\":\"assistant\",\"content\":\"${BASH_REMATCH[1]}\"},{\"role\":\"user\",\"content\":\"again $turn\"}"
done
