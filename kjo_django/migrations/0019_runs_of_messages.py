from django.db import migrations, models

from kjo_django.migrations._operations import AddColumn, CompareExactly


class Migration(migrations.Migration):
    dependencies = [("kjo_django", "0018_logs_of_failed_attempts")]

    operations = [
        AddColumn(
            model_name="transportmessage",
            name="deliveries",
            field=models.PositiveIntegerField(
                db_default=0,
                default=0,
                help_text="Times it was begun without an outcome, but for the run that goes on.",
            ),
        ),
        migrations.CreateModel(
            name="TransportRun",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "consumer",
                    models.CharField(help_text="The token of its leases.", max_length=64),
                ),
                (
                    "number",
                    models.PositiveIntegerField(
                        help_text="Of those that go on at the same time."
                    ),
                ),
                (
                    "worker",
                    models.CharField(help_text="The token of its worker.", max_length=64),
                ),
                (
                    "messages",
                    models.TextField(
                        help_text="As JSON: the id of each message by that of its row."
                    ),
                ),
                ("begun_at", models.DateTimeField()),
            ],
            options={
                "db_table": "kjo_transport_run",
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("consumer", "number"), name="kjo_transport_run_key"
                    )
                ],
            },
        ),
        CompareExactly("TransportRun"),
    ]
