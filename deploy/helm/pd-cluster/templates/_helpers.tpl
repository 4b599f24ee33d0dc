{{- define "pd.labels" -}}
app.kubernetes.io/name: pd-cluster
app.kubernetes.io/instance: {{ .root.Values.name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "pd.metadata" -}}
name: {{ .root.Values.name }}-{{ .component }}
labels:
  {{- include "pd.labels" . | nindent 2 }}
{{- end }}

{{- define "pd.modelPath" -}}
{{- if eq .Values.model.source "builtin" }}/opt/pd-cluster/pd_cluster/models/tiny-chat{{ else }}/model{{ end }}
{{- end }}

{{/* The pods of this cluster in a NetworkPolicy. */}}
{{- define "pd.peer" -}}
- podSelector:
    matchLabels:
      app.kubernetes.io/name: pd-cluster
      app.kubernetes.io/instance: {{ .Values.name }}
{{- end }}

{{/* The part of a pod's spec that all roles have. `role`: the values of the scheduler or of a worker's role. */}}
{{- define "pd.pod" -}}
automountServiceAccountToken: {{ and (eq .component "scheduler") (gt (int .root.Values.scheduler.replicas) 1) }}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .root.Values.user }}
  runAsGroup: {{ .root.Values.user }}
  fsGroup: {{ .root.Values.user }}
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .root.Values.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .role.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .role.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "pd.labels" . | nindent 8 }}
{{- end }}

{{/* Volumes of every pod; the caller's own follow. */}}
{{- define "pd.volumes" -}}
- name: secret
  secret:
    secretName: {{ .root.Values.secretName }}
    defaultMode: 0440
    items:
      - {key: cluster.secret, path: cluster.secret}
      {{- if eq .component "scheduler" }}
      - {key: scheduler.key, path: scheduler.key}
      - {key: admin.token, path: admin.token}
      {{- end }}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .root.Values.shmSize }}}
{{- if or (eq .root.Values.model.source "claim") (eq .root.Values.model.source "download") }}
- name: model
  persistentVolumeClaim: {claimName: {{ .root.Values.model.claim }}, readOnly: true}
{{- else if eq .root.Values.model.source "image" }}
- name: model
  image:
    reference: {{ required "model.image: the image with the model's files" .root.Values.model.image }}
    pullPolicy: {{ .root.Values.image.pullPolicy }}
{{- end }}
{{- end }}

{{- define "pd.mounts" -}}
- {name: secret, mountPath: /run/secrets/pd-cluster, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if ne .root.Values.model.source "builtin" }}
- {name: model, mountPath: /model, readOnly: true}
{{- end }}
{{- end }}

{{- define "pd.container" -}}
image: {{ .root.Values.image.repository }}:{{ .root.Values.image.tag }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  readOnlyRootFilesystem: true
workingDir: /tmp # libraries of devices write there
{{- end }}

{{/* Flags of every role: one model, one secret. */}}
{{- define "pd.args" -}}
- --model={{ include "pd.modelPath" .root }}
- --served-model-name={{ .root.Values.model.servedName }}
- --secret-file=/run/secrets/pd-cluster/cluster.secret
- --drain-timeout={{ .root.Values.drainSeconds }}
- --log-format=json
- --host=0.0.0.0
{{- end }}

{{- define "pd.env" -}}
- {name: HOME, value: /tmp}
{{- range $name, $value := .root.Values.env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
