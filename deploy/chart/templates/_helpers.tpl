{{/* Which pods are a part's: (list . PART) */}}
{{- define "kvroute.selector" -}}
app.kubernetes.io/name: kvroute
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
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
image: {{ with .registry }}{{ . }}/{{ end }}kvroute-{{ index $ 1 }}:{{ .tag | default (index $ 0).Chart.AppVersion }}
imagePullPolicy: {{ .pullPolicy }}
{{- end }}
{{- end }}

{{/* What the pods of all parts have: (list . SELECTOR VALUES) */}}
{{- define "kvroute.pod" -}}
{{- $root := index . 0 }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with (index . 2).nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with (index . 2).tolerations }}
tolerations: {{ toJson . }}
{{- end }}
# A Service's variables, such as KVROUTE_ROUTER_PORT, look like settings.
enableServiceLinks: false
{{- if index . 1 }}
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

{{- define "kvroute.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvroute.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
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

{{- define "kvroute.podIP" -}}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
{{- end }}

{{- define "kvroute.keysSecret" -}}
{{ .Values.keys.secret | default (print .Release.Name "-keys") }}
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

{{/* "true" if some engines prefill for others. */}}
{{- define "kvroute.split" -}}
{{- range .Values.engines.pools }}{{ if ne .role "both" }}true{{ break }}{{ end }}{{ end }}
{{- end }}

{{/* The Deployment that planners scale, or that of the role prefill: (list . IS_PREFILL). They size
their own namespace alone. */}}
{{- define "kvroute.scaled" -}}
{{- $root := index . 0 }}
{{- if $root.Values.model }}
{{- range $root.Values.engines.pools }}
{{- $is_own := eq (.namespace | default $root.Values.namespace) $root.Values.namespace }}
{{- if and $is_own (eq (eq .role "prefill") (index $ 1)) }}{{ $root.Release.Name }}-{{ .name }}{{ break }}{{ end }}
{{- end }}
{{- else if not (index . 1) }}{{ $root.Release.Name }}-worker
{{- end }}
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
