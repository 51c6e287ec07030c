{{/* The models of the release, as a JSON list: what values say of each, with `prefix` of its resources'
names, and `kind`: simulated, own (the chart makes its engines) or found (they are there). */}}
{{- define "kvroute.fleets" -}}
{{- $fleets := list }}
{{- range .Values.models | default (list dict) }}
{{- $common := pick $.Values "namespace" "model" "tokenizer" "engines" "agent" "planner" "simulated" }}
{{- $fleet := mergeOverwrite (deepCopy $common) (deepCopy .) }}
{{- if .name }}
{{- $_ := set $fleet "namespace" (.namespace | default .name) }}
{{- end }}
{{- $_ := set $fleet "prefix" (join "-" (compact (list $.Release.Name .name))) }}
{{- $kind := ternary "own" "simulated" (not (empty $fleet.model)) }}
{{- $_ := set $fleet "kind" (ternary $kind "found" $fleet.engines.enabled) }}
{{- $_ := set $fleet "discovers" (or (eq $fleet.kind "found") (and (eq $fleet.kind "own") $fleet.agent.discovery)) }}
{{- $fleets = append $fleets $fleet }}
{{- end }}
{{- toJson $fleets }}
{{- end }}

{{/* Which pods are a part's: (list . PART), of one model: (list . PART FLEET) */}}
{{- define "kvroute.selector" -}}
app.kubernetes.io/name: kvroute
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- if gt (len .) 2 }}
{{- with (index . 2).name }}
kvroute.io/model: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvroute.labels" -}}
{{ include "kvroute.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{/* The image of a part, and how it is pulled: (list . PART) */}}
{{- define "kvroute.image" -}}
{{- with (index . 0).Values.image -}}
image: {{ with .registry }}{{ . }}/{{ end }}kvroute-{{ index $ 1 }}:{{ .tag | default (index $ 0).Chart.AppVersion }}{{ with get .digests (index $ 1) }}@{{ . }}{{ end }}
imagePullPolicy: {{ .pullPolicy }}
{{- end }}
{{- end }}

{{/* What the pods of all parts have: (list . SELECTOR VALUES) */}}
{{- define "kvroute.pod" -}}
{{- $root := index . 0 }}
{{- $values := index . 2 }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
# A Service's variables, such as KVROUTE_ROUTER_PORT, look like settings.
enableServiceLinks: false
{{- with omit $values.pod "labels" "securityContext" "containerSecurityContext" "initContainers" "strategy" "serviceAccountName" }}
{{ toYaml . }}
{{- end }}
{{- if and (index . 1) (not $values.pod.topologySpreadConstraints) }}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ index $ 1 | fromYaml | toJson }}
  {{- end }}
{{- end }}
{{- end }}

{{/* The labels of a part's pods: (list LABELS VALUES) */}}
{{- define "kvroute.podLabels" -}}
{{ merge (index . 0 | fromYaml) ((index . 1).pod.labels | default dict) | toJson }}
{{- end }}

{{/* The account of a part that asks nothing of Kubernetes: VALUES */}}
{{- define "kvroute.noAccount" -}}
{{- with .pod.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
automountServiceAccountToken: false
{{- end }}

{{/* Of a part's pods: VALUES, and of its container, the same. Of others: (list VALUES DEFAULT) */}}
{{- define "kvroute.podSecurity" -}}
{{- include "kvroute.podSecurityOf" (list . "runAsNonRoot: true\nseccompProfile: {type: RuntimeDefault}") }}
{{- end }}

{{- define "kvroute.podSecurityOf" -}}
securityContext:
  {{- mergeOverwrite (index . 1 | fromYaml) ((index . 0).pod.securityContext | default dict) | toYaml | nindent 2 }}
{{- end }}

{{- define "kvroute.containerSecurity" -}}
{{- include "kvroute.containerSecurityOf" (list . "allowPrivilegeEscalation: false\nreadOnlyRootFilesystem: true\ncapabilities: {drop: [ALL]}") }}
{{- end }}

{{- define "kvroute.containerSecurityOf" -}}
securityContext:
  {{- mergeOverwrite (index . 1 | fromYaml) ((index . 0).pod.containerSecurityContext | default dict) | toYaml | nindent 2 }}
{{- end }}

{{- define "kvroute.strategy" -}}
{{- with .pod.strategy }}
strategy: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "kvroute.initContainers" -}}
{{- with .pod.initContainers }}
initContainers: {{ toJson . }}
{{- end }}
{{- end }}

{{/* The command of a part: (list COMMAND VALUES) */}}
{{- define "kvroute.args" -}}
args: {{ concat (list "kvroute" (index . 0)) (index . 1).extraArgs | toJson }}
{{- end }}

{{/* An entry of env from a Secret: (list NAME SECRET KEY) */}}
{{- define "kvroute.secretEnv" -}}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef: {name: {{ index . 1 }}, key: {{ index . 2 }}}
{{- end }}

{{/* Where traces go. */}}
{{- define "kvroute.tracing" -}}
{{- with .Values.tracing.endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- end }}

{{/* Where a part listens, if that is not what its image says. */}}
{{- define "kvroute.host" -}}
{{- if .Values.ipv6 }}
- {name: KVROUTE_HOST, value: "::"}
{{- end }}
{{- end }}

{{/* The URL of a port of the pod itself: (list . PORT) */}}
{{- define "kvroute.ownURL" -}}
http://{{ ternary "[$(POD_IP)]" "$(POD_IP)" (index . 0).Values.ipv6 }}:{{ index . 1 }}
{{- end }}

{{- define "kvroute.podIP" -}}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
{{- end }}

{{- define "kvroute.keysSecret" -}}
{{ .Values.keys.secret | default (print .Release.Name "-keys") }}
{{- end }}

{{/* The Secret with the key that engines of a model ask for, and its key there: (list NAME . FLEET) */}}
{{- define "kvroute.engineKeyEnv" -}}
{{- with (index . 2).engines.keySecret }}
{{- if .name }}
{{- include "kvroute.secretEnv" (list (index $ 0) .name .key) }}
{{- else }}
{{- include "kvroute.secretEnv" (list (index $ 0) (include "kvroute.keysSecret" (index $ 1)) "worker") }}
{{- end }}
{{- end }}
{{- end }}

{{/* A peer of a NetworkPolicy: what requests of a model go to, as JSON: (list . FLEET); and its port. */}}
{{- define "kvroute.enginePeer" -}}
{{- $fleet := index . 1 }}
{{- if eq $fleet.kind "found" }}
{{- $peer := dict "podSelector" (dict "matchLabels" $fleet.engines.selector.matchLabels) }}
{{- with $fleet.engines.selector.namespaces }}
{{- $in := dict "key" "kubernetes.io/metadata.name" "operator" "In" "values" . }}
{{- $_ := set $peer "namespaceSelector" (dict "matchExpressions" (list $in)) }}
{{- end }}
{{- toJson $peer }}
{{- else }}
{{- $part := ternary "engine" "worker" (eq $fleet.kind "own") }}
{{- dict "podSelector" (dict "matchLabels" (include "kvroute.selector" (list (index . 0) $part $fleet) | fromYaml)) | toJson }}
{{- end }}
{{- end }}

{{- define "kvroute.enginePort" -}}
{{- if eq .kind "found" }}{{ toJson .engines.port }}{{ else }}{{ ternary 8000 8081 (eq .kind "own") }}{{ end }}
{{- end }}

{{- define "kvroute.redisSecret" -}}
{{ .Values.redis.secret | default (print .Release.Name "-redis") }}
{{- end }}

{{/* Namespace and Redis: (list . USER NAMESPACE) */}}
{{- define "kvroute.redisEnv" -}}
{{- $root := index . 0 }}
{{- $user := index . 1 -}}
- {name: KVROUTE_NAMESPACE, value: {{ index . 2 | quote }}}
{{- if $root.Values.redis.external.secret }}
{{ include "kvroute.secretEnv" (list "REDIS_URL" $root.Values.redis.external.secret $user) }}
{{- else }}
{{ include "kvroute.secretEnv" (list "REDIS_PASSWORD" (include "kvroute.redisSecret" $root) $user) }}
- name: REDIS_URL
  value: redis://kvroute-{{ $user }}:$(REDIS_PASSWORD)@{{ $root.Release.Name }}-redis:6379/0
{{- end }}
{{- end }}

{{/* volumeMounts of a part: (list . VALUES), and its volumes: (list . VALUES SIZE_OF_TMP) */}}
{{- define "kvroute.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if (index . 0).Values.redis.external.caSecret }}
- {name: redis-ca, mountPath: /etc/kvroute/redis, readOnly: true}
{{- end }}
{{- with (index . 1).extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvroute.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: {{ index . 2 }}}
{{- with (index . 0).Values.redis.external.caSecret }}
- name: redis-ca
  secret: {secretName: {{ . }}, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- with (index . 1).extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* A budget for a part of several pods: (list . NAME SELECTOR) */}}
{{- define "kvroute.disruptionBudget" -}}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ index . 1 }}
  labels: {{ index . 2 | fromYaml | toJson }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{ index . 2 | fromYaml | toJson }}
{{- end }}

{{/* "true" if some engines of a model prefill for others: FLEET */}}
{{- define "kvroute.split" -}}
{{- if eq .kind "own" }}{{ range .engines.pools }}{{ if ne .role "both" }}true{{ break }}{{ end }}{{ end }}{{ end }}
{{- end }}

{{/* KIND/NAME of what planners of a model scale, or that of the role prefill: (list FLEET IS_PREFILL).
They size their own namespace alone. */}}
{{- define "kvroute.scaled" -}}
{{- $fleet := index . 0 }}
{{- if eq $fleet.kind "found" }}
{{- ternary $fleet.planner.prefillScale $fleet.planner.scale (index . 1) }}
{{- else if eq $fleet.kind "own" }}
{{- range $fleet.engines.pools }}
{{- $is_own := eq (.namespace | default $fleet.namespace) $fleet.namespace }}
{{- if and $is_own (eq (eq .role "prefill") (index $ 1)) }}deployment/{{ $fleet.prefix }}-{{ .name }}{{ break }}{{ end }}
{{- end }}
{{- else if not (index . 1) }}deployment/{{ $fleet.prefix }}-worker
{{- end }}
{{- end }}

{{/* The namespace of Kubernetes in which a model is scaled: (list . FLEET) */}}
{{- define "kvroute.scaledNamespace" -}}
{{- $fleet := index . 1 }}
{{- $names := ternary $fleet.engines.selector.namespaces list (eq $fleet.kind "found") }}
{{- first (append $names (index . 0).Release.Namespace) }}
{{- end }}

{{/* A Secret whose values are made once: (list . NAME KEYS) */}}
{{- define "kvroute.madeSecret" -}}
{{- $root := index . 0 }}
{{- $made := (lookup "v1" "Secret" $root.Release.Namespace (index . 1)).data | default dict -}}
apiVersion: v1
kind: Secret
metadata:
  name: {{ index . 1 }}
data:
  {{- range index . 2 }}
  {{ . }}: {{ get $made . | default (randAlphaNum 40 | b64enc) }}
  {{- end }}
{{- end }}
